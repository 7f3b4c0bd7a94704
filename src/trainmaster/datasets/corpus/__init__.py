"""Tokenised corpora: find and read files, tokenise and index them, validate them, fetch them from the Hub."""
