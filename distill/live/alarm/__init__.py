"""The alarm: has the acceptance of the served draft fallen?"""
