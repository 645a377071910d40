"""What people see: terminal output and pages."""
