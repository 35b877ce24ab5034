"""The processes of a server: supervisor, web workers, coordinator, and how one of many coordinators leads."""
