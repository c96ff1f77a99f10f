"""Remote hosts: which device is where (hosts), ssh, and the certificates that devices show each other.

In: a hosts file, keys. Out: connections, files copied, programs started there and stopped.
"""
