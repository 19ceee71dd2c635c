"""The front door: PyG layers become expressions; PyG's vocabulary stops here."""
