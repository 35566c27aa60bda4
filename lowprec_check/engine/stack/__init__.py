"""What several backends share. torch is imported only inside the functions that prepare a model."""
