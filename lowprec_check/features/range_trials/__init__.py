"""What single places with values out of range do to the output of fp32."""
