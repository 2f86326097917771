"""The local web page over run folders: reading runs, answering requests, and refusing unauthorised ones. It only reads
files, writes none, and keeps nothing in memory but caches.
"""
