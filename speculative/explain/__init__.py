"""Where a draft gains and loses, how far it could get, and whether that still holds."""
