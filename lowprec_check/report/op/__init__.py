"""What the catalog knows, as text, document and grid."""
