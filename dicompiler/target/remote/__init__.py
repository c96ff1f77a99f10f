"""Access to other hosts: the hosts file, ssh, and the certificates of devices."""

AUTHORITY_DIRECTORY = "authority"
"""Directory of the certificate authority's own key, which stays on the host that created it."""
COORDINATOR_DIRECTORY = "coordinator"
"""Directory of the keys of the coordinator, the process that sends frames to the devices."""
DEVICES_DIRECTORY = "devices"
"""Directory that contains one directory with keys for each device."""
DEFAULT_VALIDITY_DAYS, MAX_VALIDITY_DAYS = 825, 36_500
"""Days for which a certificate is valid by default, and at most."""
