"""A load client for servers, and its reports."""
