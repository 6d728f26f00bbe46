// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A double of the API server: objects by their paths, versions, conflicts and watches, for one token.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

#[derive(Default)]
struct Objects {
    by_path: BTreeMap<String, Value>,
    version: u64,
    writes: Vec<Method>,
    /// Number of calls to refuse from now on.
    refusals: usize,
    /// Drops a field, as a server without the feature does.
    is_old: bool,
    token: String,
}

pub(crate) struct ApiDouble {
    objects: Arc<Mutex<Objects>>,
    version: watch::Sender<u64>,
    pub(crate) address: String,
    server: JoinHandle<()>,
}

impl Drop for ApiDouble {
    fn drop(&mut self) {
        self.server.abort();
    }
}

type Answer = (StatusCode, String);

impl ApiDouble {
    /// Listens without TLS.
    pub(crate) async fn start(token: &str) -> ApiDouble {
        ApiDouble::listen(token, None).await
    }

    /// Listens by TLS, with the files `server.crt` and `server.key` of a directory.
    pub(crate) async fn start_tls(token: &str, directory: &Path) -> ApiDouble {
        let certificates = CertificateDer::pem_file_iter(directory.join("server.crt")).unwrap();
        let key = PrivateKeyDer::from_pem_file(directory.join("server.key")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(certificates.map(Result::unwrap).collect(), key)
            .unwrap();
        ApiDouble::listen(token, Some(TlsAcceptor::from(Arc::new(config)))).await
    }

    async fn listen(token: &str, tls: Option<TlsAcceptor>) -> ApiDouble {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let address = format!("{scheme}://{}", listener.local_addr().unwrap());
        let objects = Arc::new(Mutex::new(Objects { token: token.into(), ..Objects::default() }));
        let (version, changes) = watch::channel(0);
        let known = objects.clone();
        let sender = version.clone();
        let server = tokio::spawn(async move {
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                let (known, sender, changes) = (known.clone(), sender.clone(), changes.clone());
                let tls = tls.clone();
                let service = service_fn(move |request| {
                    let (known, sender, changes) = (known.clone(), sender.clone(), changes.clone());
                    async move { Ok::<_, Infallible>(answer(known, sender, changes, request).await) }
                });
                tokio::spawn(async move {
                    match tls {
                        None => {
                            let _ = http1::Builder::new()
                                .serve_connection(TokioIo::new(tcp), service)
                                .await;
                        }
                        Some(tls) => {
                            // A client that does not trust the certificate is gone here.
                            if let Ok(stream) = tls.accept(tcp).await {
                                let stream = TokioIo::new(stream);
                                let _ =
                                    http1::Builder::new().serve_connection(stream, service).await;
                            }
                        }
                    }
                });
            }
        });
        ApiDouble { objects, version, address, server }
    }

    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.objects.lock().unwrap().by_path.get(path).cloned()
    }

    /// Puts an object there, as another client does. No value removes the object.
    pub(crate) fn put(&self, path: &str, object: Option<Value>) {
        let mut objects = self.objects.lock().unwrap();
        write(&mut objects, path, object);
        self.version.send_replace(objects.version);
    }

    pub(crate) fn refuse(&self, calls: usize) {
        self.objects.lock().unwrap().refusals = calls;
    }

    pub(crate) fn be_old(&self) {
        self.objects.lock().unwrap().is_old = true;
    }

    pub(crate) fn renew_token(&self, token: &str) {
        self.objects.lock().unwrap().token = token.into();
    }

    /// The changes by the driver so far.
    pub(crate) fn writes(&self) -> Vec<Method> {
        self.objects.lock().unwrap().writes.clone()
    }
}

fn write(objects: &mut Objects, path: &str, object: Option<Value>) {
    objects.version += 1;
    match object {
        None => {
            objects.by_path.remove(path);
        }
        Some(mut object) => {
            object["metadata"]["resourceVersion"] = json!(objects.version.to_string());
            objects.by_path.insert(path.into(), object);
        }
    }
}

fn status(code: StatusCode, message: &str) -> Answer {
    (code, json!({"kind": "Status", "message": message}).to_string())
}

async fn answer(
    objects: Arc<Mutex<Objects>>,
    version: watch::Sender<u64>,
    mut changes: watch::Receiver<u64>,
    request: Request<Incoming>,
) -> Response<Full<Bytes>> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let path = head.uri.path().to_owned();
    let query = head.uri.query().unwrap_or_default();
    let (code, text) = if query.contains("watch=true") {
        let value = |key: &str| {
            let pair = query.split('&').find_map(|pair| pair.strip_prefix(key));
            pair.unwrap().to_owned()
        };
        let name = value("fieldSelector=metadata.name%3D");
        let after: u64 = value("resourceVersion=").parse().unwrap();
        let object = format!("{path}/{name}");
        let is_changed = |_: &u64| {
            let objects = objects.lock().unwrap();
            let now =
                objects.by_path.get(&object).map(|one| one["metadata"]["resourceVersion"].clone());
            now.is_none_or(|now| now.as_str().unwrap().parse::<u64>().unwrap() > after)
        };
        changes.wait_for(is_changed).await.unwrap();
        (StatusCode::OK, "{\"type\":\"MODIFIED\"}\n".to_owned())
    } else {
        let mut objects = objects.lock().unwrap();
        let said = head.headers.get("authorization").map(|value| value.to_str().unwrap());
        if said != Some(&format!("Bearer {}", objects.token)) {
            status(StatusCode::UNAUTHORIZED, "Unauthorized")
        } else if objects.refusals > 0 {
            objects.refusals -= 1;
            status(StatusCode::SERVICE_UNAVAILABLE, "not now")
        } else {
            let answer = change(&mut objects, &head.method, &path, &body);
            version.send_replace(objects.version);
            answer
        }
    };
    Response::builder().status(code).body(Full::from(text)).unwrap()
}

fn change(objects: &mut Objects, method: &Method, path: &str, body: &[u8]) -> Answer {
    if method == Method::GET {
        return match objects.by_path.get(path) {
            // An object that is text is no JSON: the liar.
            Some(Value::String(text)) => (StatusCode::OK, text.clone()),
            Some(object) => (StatusCode::OK, object.to_string()),
            None => status(StatusCode::NOT_FOUND, &format!("{path} not found")),
        };
    }
    objects.writes.push(method.clone());
    if method == Method::DELETE {
        write(objects, path, None);
        return status(StatusCode::OK, "");
    }
    let mut object: Value = serde_json::from_slice(body).unwrap();
    let mut place = path.to_owned();
    if method == Method::POST {
        place = format!("{path}/{}", object["metadata"]["name"].as_str().unwrap());
        if objects.by_path.contains_key(&place) {
            return status(StatusCode::CONFLICT, "already exists");
        }
    } else if objects.by_path[path]["metadata"]["resourceVersion"]
        != object["metadata"]["resourceVersion"]
    {
        return status(StatusCode::CONFLICT, "the object has been modified");
    }
    if objects.is_old {
        for device in object["spec"]["devices"].as_array_mut().unwrap() {
            device.as_object_mut().unwrap().remove("allowMultipleAllocations");
        }
    }
    write(objects, &place, Some(object));
    (StatusCode::CREATED, objects.by_path[&place].to_string())
}
