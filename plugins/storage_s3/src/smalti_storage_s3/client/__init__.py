"""S3 as a storage: settings, transports, retries, whole files. Imports boto3 and obstore when a request is sent."""
