"""The local web page over run folders: what it reads of them, how it answers, and whom it refuses.

Files alone are read, none is written, and nothing is kept but what can be read again.
"""
