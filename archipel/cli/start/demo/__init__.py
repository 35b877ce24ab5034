"""The main job, end to end: cloud, conversion, server, devices, report."""
