"""The library: everything below the command line. Packages import only from layers below their own (docs/developer/architecture.md)."""
