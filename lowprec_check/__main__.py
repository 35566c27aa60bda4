"""``python -m lowprec_check``."""

from lowprec_check.cli.main import main

main()
