"""Connections to other hosts: hosts files, ssh, and the certificates of devices."""
