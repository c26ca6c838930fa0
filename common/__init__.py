"""What every process shares and what never loads torch."""
