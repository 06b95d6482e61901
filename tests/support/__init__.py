"""What several test files share. No test stands here."""
