"""Emulation of boards on this host: network namespaces with rate-limited links, and delayed computing."""
