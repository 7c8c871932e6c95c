"""The lab: makes every known loss happen, prevents it by the safe setting, and has a checker say what was lost."""
