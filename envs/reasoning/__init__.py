"""What a model writes before and after its moves: the forms that a recipe may ask for, and how well what is written
describes the board. By rule: no judge, no key."""
