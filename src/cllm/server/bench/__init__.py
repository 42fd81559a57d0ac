"""Load runs on this server that an administrator starts, follows and compares at /bench."""
