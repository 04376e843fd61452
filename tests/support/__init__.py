"""Code shared by the tests. Test modules import from here and never from each other."""
