"""Emulation of boards on this host: a network of namespaces and limited links, and segments at the boards' speed."""
