// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client of the API server of Kubernetes: objects as JSON, a connection for each call.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Time limit of a call.
const LIMIT: Duration = Duration::from_secs(15);
/// How long the server watches for changes, in seconds.
const WATCH: u64 = 300;
/// The largest accepted answer. Objects of a cluster have at most 1.5 MiB.
const LARGEST: usize = 2 << 20;

/// A call without an answer to use.
#[derive(Debug, Error)]
pub enum ApiError {
    /// The address is of no API server.
    #[error(
        "{0:?} is no address of an API server: https://HOST:PORT, or http://ADDRESS:PORT of this machine"
    )]
    Address(String),
    /// A file of the service account cannot be used.
    #[error("the service account's {file}: {why}")]
    Account {
        /// The file.
        file: PathBuf,
        /// The reason.
        why: String,
    },
    /// No connection, or none as TLS demands.
    #[error("no connection to the API server at {address}: {error}")]
    Connection {
        /// Host and port.
        address: String,
        /// The reason.
        error: std::io::Error,
    },
    /// The connection broke, or had something else than HTTP.
    #[error("the connection to the API server: {0}")]
    Http(#[from] hyper::Error),
    /// The server refused the call.
    #[error("the API server answers {method} {path} with {status}: {message}")]
    Refused {
        /// The method.
        method: Method,
        /// The object.
        path: String,
        /// The answer.
        status: StatusCode,
        /// The server's reason.
        message: String,
    },
    /// The answer is too long, breaks off, or is no JSON.
    #[error("the answer of the API server cannot be read: {0}")]
    Answer(String),
    /// No answer in time.
    #[error("no answer of the API server within {} s", LIMIT.as_secs())]
    Late,
}

impl ApiError {
    /// Whether the server has no such object.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, ApiError::Refused { status: StatusCode::NOT_FOUND, .. })
    }
}

/// The API server, and the service account of this program.
#[derive(Clone)]
pub struct ApiServer {
    host: String,
    port: u16,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    token: PathBuf,
}

impl ApiServer {
    /// The server at an address, with the files `token` and `ca.crt` of a directory. A token goes over TLS,
    /// or stays on this machine.
    ///
    /// # Errors
    ///
    /// An address of another form; a missing or wrong `ca.crt`.
    pub fn new(address: &str, account: &Path) -> Result<ApiServer, ApiError> {
        let wrong = || ApiError::Address(address.to_owned());
        let (scheme, rest) = address.split_once("://").ok_or_else(wrong)?;
        let (host, port) = rest.trim_end_matches('/').rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().map_err(|_| wrong())?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let is_here = host.parse().is_ok_and(|address: IpAddr| address.is_loopback());
        let tls = match scheme {
            "https" => {
                let name = ServerName::try_from(host.clone()).map_err(|_| wrong())?;
                Some((TlsConnector::from(Arc::new(trusting(&account.join("ca.crt"))?)), name))
            }
            "http" if is_here => None,
            _ => return Err(wrong()),
        };
        Ok(ApiServer { host, port, tls, token: account.join("token") })
    }

    /// An object, or the server's answer to a change of it.
    ///
    /// # Errors
    ///
    /// No answer, or another one than success.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, ApiError> {
        let call = async {
            let answer = self.ask(method.clone(), path, body).await?;
            let status = answer.status();
            let bytes = Limited::new(answer.into_body(), LARGEST).collect().await;
            let bytes = bytes.map_err(|error| ApiError::Answer(error.to_string()))?.to_bytes();
            let value: Result<Value, _> = serde_json::from_slice(&bytes);
            if !status.is_success() {
                let message =
                    value.ok().and_then(|value| value["message"].as_str().map(str::to_owned));
                let message = message.unwrap_or_default();
                return Err(ApiError::Refused { method, path: path.to_owned(), status, message });
            }
            value.map_err(|error| ApiError::Answer(error.to_string()))
        };
        tokio::time::timeout(LIMIT, call).await.map_err(|_| ApiError::Late)?
    }

    /// Waits until something may have happened to an object of a collection behind a version.
    ///
    /// # Errors
    ///
    /// No answer, or another one than success.
    pub async fn changed(
        &self,
        collection: &str,
        name: &str,
        version: &str,
    ) -> Result<(), ApiError> {
        let path = format!(
            "{collection}?watch=true&fieldSelector=metadata.name%3D{name}&resourceVersion={version}\
             &timeoutSeconds={WATCH}"
        );
        let ask = self.ask(Method::GET, &path, None);
        let answer = tokio::time::timeout(LIMIT, ask).await.map_err(|_| ApiError::Late)??;
        let status = answer.status();
        if !status.is_success() {
            let message = "no watch".to_owned();
            return Err(ApiError::Refused { method: Method::GET, path, status, message });
        }
        // Each event is a reason to look. A server that is gone without a word ends the wait, too.
        let mut body = answer.into_body();
        let limit = Duration::from_secs(WATCH) + LIMIT;
        let _ = tokio::time::timeout(limit, body.frame()).await;
        Ok(())
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Response<Incoming>, ApiError> {
        let address = format!("{}:{}", self.host, self.port);
        let failed = |error| ApiError::Connection { address: address.clone(), error };
        let tcp = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(failed)?;
        // The kubelet replaces the token now and then.
        let token = std::fs::read_to_string(&self.token).map_err(|error| ApiError::Account {
            file: self.token.clone(),
            why: error.to_string(),
        })?;
        let authority = if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            address.clone()
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, authority)
            .header(header::AUTHORIZATION, format!("Bearer {}", token.trim()))
            .header(header::ACCEPT, "application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(body.map(Value::to_string).unwrap_or_default()))
            .map_err(|error| ApiError::Account {
                file: self.token.clone(),
                why: error.to_string(),
            })?;
        match &self.tls {
            None => send(tcp, request).await,
            Some((tls, name)) => {
                send(tls.connect(name.clone(), tcp).await.map_err(failed)?, request).await
            }
        }
    }
}

/// TLS towards a server with a certificate by the authorities of a file.
fn trusting(file: &Path) -> Result<ClientConfig, ApiError> {
    let wrong = |why: String| ApiError::Account { file: file.to_owned(), why };
    let mut roots = RootCertStore::empty();
    for one in CertificateDer::pem_file_iter(file).map_err(|error| wrong(error.to_string()))? {
        let one = one.map_err(|error| wrong(error.to_string()))?;
        roots.add(one).map_err(|error| wrong(error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(wrong("there is no certificate".to_owned()));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(error.to_string()))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

async fn send<S>(stream: S, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, ApiError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The connection ends with its last user.
    tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(sender.send_request(request).await?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    #[test]
    fn a_token_leaves_the_machine_by_tls_only() {
        let account = Path::new("/nowhere");
        for here in ["http://127.0.0.1:80", "http://[::1]:80/"] {
            ApiServer::new(here, account).ok().unwrap();
        }
        for wrong in ["http://10.96.0.1:80", "http://localhost:80", "10.96.0.1:443", "https://x"] {
            let error = ApiServer::new(wrong, account).err().unwrap();
            assert!(matches!(error, ApiError::Address(_)), "{wrong}: {error}");
        }
        let error = ApiServer::new("https://10.96.0.1:443", account).err().unwrap();
        assert!(
            error.to_string().starts_with("the service account's /nowhere/ca.crt: "),
            "{error}"
        );
    }
}
