"""A mixed load on a real server, and whether anything grows: `python -m dynamictp.testing.soak`."""
