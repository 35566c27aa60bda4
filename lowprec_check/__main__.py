"""``python -m lowprec_check``."""

from lowprec_check.cli import main

main()
