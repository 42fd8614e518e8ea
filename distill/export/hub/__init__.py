"""What an export says in the formats of others, and how it is uploaded: speculation profile, evaluation results, hub."""
