"""The processes of a server, and its connections."""
