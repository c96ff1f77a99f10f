"""A cluster emulated on this host: its network made of namespaces and shaped lines, its computing held back."""
