"""The log of live traffic as files: one record a response, its laws, who writes and who reads."""
