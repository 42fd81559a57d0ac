"""Data that clients store on the server: records of files and batches in SQLite, contents in files,
responses in memory. Knows no HTTP.
"""
