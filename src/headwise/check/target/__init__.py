"""Whatever is to be checked, resolved: how it is built, called and masked."""
