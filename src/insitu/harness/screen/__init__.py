"""Terminal output and pages."""
