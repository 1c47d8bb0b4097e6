"""The library: everything below the command line. Packages import only from floors below their own (README, "map")."""
