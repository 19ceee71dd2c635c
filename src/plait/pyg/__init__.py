"""The front door: PyG layers become expressions; the words of PyG stop here."""
