"""What a run is: its stages in order, the modes, diagnosis and the dry run. No mathematics lives here."""
