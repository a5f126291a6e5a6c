"""Bytes on disk and elsewhere: atomic replacement, mapped files, raw elements, remote files."""
