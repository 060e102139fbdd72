"""How long until a hurt job trains again?"""
