"""What a result means, in sentences: one function for each kind of statement, and nothing else
writes sentences about a result.
"""
