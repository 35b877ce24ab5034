"""Rounds among edge servers, and this server's own rounds that serve one of its upstream server."""
