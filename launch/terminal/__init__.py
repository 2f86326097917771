"""What people see in a terminal while a run goes on."""
