"""What the tests share. They import from here and never from each other."""
