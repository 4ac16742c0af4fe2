"""S3 as a storage: settings, transports, retries, whole files. Imports botocore and obstore when a request is sent."""
