"""The catalog as text, as a document and as a grid."""
