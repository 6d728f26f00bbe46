// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver of dynamic resource allocation: the kubelet's requests, and the node's slice.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Method;
use serde_json::Value;
use thiserror::Error;
use tokio::sync::Notify;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::Grpc;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tracing::{info, warn};

use crate::api::Empty;
use crate::api_server::{ApiError, ApiServer};
use crate::dra_api::{
    self, Claim, ClaimsRequest, PluginInfo, PrepareResponse, Prepared, PreparedDevice,
    RegistrationStatus, UnprepareResponse, Unprepared,
};
use crate::node::{DRIVER, Node, is_name};
use crate::slices;
use crate::socket::Socket;

/// Interval of checks of the socket.
const LOOK: Duration = Duration::from_millis(100);
/// Pause after a failure to make the socket.
const PAUSE: Duration = Duration::from_secs(5);

/// A claim that cannot be prepared.
#[derive(Debug, Error)]
enum ClaimError {
    #[error("no claim has the name {0:?} in the namespace {1:?}")]
    Name(String, String),
    #[error(transparent)]
    Server(#[from] ApiError),
    #[error("the claim has the identity {found:?} and not {asked:?}")]
    Other { found: String, asked: String },
    #[error("the claim has no device of {DRIVER}")]
    Empty,
    #[error("the claim has the device {device:?} of {pool:?}, which is not on this node")]
    Elsewhere { device: String, pool: String },
    #[error("the CDI specification {file}: {why}")]
    Specification { file: PathBuf, why: String },
}

/// The files of a driver on its node.
#[derive(Clone, Debug)]
pub struct Files {
    /// The directory in which the kubelet looks for sockets of plugins.
    pub registry: PathBuf,
    /// The CDI specification by `smc cdi`.
    pub specification: PathBuf,
    /// The place of the specification for the container runtime.
    pub runtime: PathBuf,
}

/// Serves the kubelet and publishes the slice of a node, until the future is dropped. Errors are logged and
/// retried.
pub async fn drive(node: Node, files: Files, server: ApiServer) {
    let driver = Arc::new(Driver { node, files, server, is_registered: Notify::new() });
    let slice = slices::publish(&driver.node, &driver.server, &driver.is_registered);
    tokio::join!(slice, listen(&driver));
}

/// Keeps the socket for the kubelet. The kubelet registers each new socket in the directory, and all of them
/// when the kubelet starts.
async fn listen(driver: &Arc<Driver>) {
    let path = driver.socket();
    let mut socket: Option<Socket> = None;
    loop {
        if !socket.as_ref().is_some_and(Socket::is_there) {
            // The file of the old one is not the new one's.
            socket = None;
            match Socket::open(path.clone(), Calls(driver.clone())) {
                Ok(open) => socket = Some(open),
                Err(error) => {
                    warn!(socket = %path.display(), %error, "cannot make the driver's socket");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

struct Driver {
    node: Node,
    files: Files,
    server: ApiServer,
    is_registered: Notify,
}

impl Driver {
    fn socket(&self) -> PathBuf {
        self.files.registry.join(format!("{DRIVER}.sock"))
    }

    fn info(&self) -> PluginInfo {
        PluginInfo {
            kind: dra_api::TYPE.into(),
            name: DRIVER.into(),
            endpoint: self.socket().display().to_string(),
            supported_versions: vec![dra_api::SERVICE.into()],
        }
    }

    fn notify(&self, status: &RegistrationStatus) {
        if status.plugin_registered {
            info!("registered with the kubelet");
            // A starting kubelet has removed the slice.
            self.is_registered.notify_one();
        } else {
            warn!(error = status.error, "the kubelet did not register the driver");
        }
    }

    async fn prepare(&self, request: ClaimsRequest) -> PrepareResponse {
        let mut response = PrepareResponse::default();
        for claim in request.claims {
            let prepared = self.prepare_claim(&claim).await.unwrap_or_else(|error| {
                warn!(claim.namespace, claim.name, %error, "the claim cannot be prepared");
                Prepared { devices: Vec::new(), error: error.to_string() }
            });
            response.claims.insert(claim.uid, prepared);
        }
        response
    }

    /// The devices of a claim. Nothing is kept of the claim, so each call is like the first.
    async fn prepare_claim(&self, claim: &Claim) -> Result<Prepared, ClaimError> {
        let Claim { namespace, uid, name } = claim;
        if !is_name(namespace) || !is_name(name) {
            return Err(ClaimError::Name(name.clone(), namespace.clone()));
        }
        let path = format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}");
        let object = self.server.call(Method::GET, &path, None).await?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let found = text(&object["metadata"]["uid"]);
        if found != *uid {
            return Err(ClaimError::Other { found, asked: uid.clone() });
        }
        let results = object["status"]["allocation"]["devices"]["results"].as_array();
        let mut devices: Vec<PreparedDevice> = Vec::new();
        for result in results.into_iter().flatten().filter(|result| result["driver"] == DRIVER) {
            let (device, pool) = (text(&result["device"]), text(&result["pool"]));
            let known = self.node.pool(&device).filter(|_| pool == self.node.name());
            let Some(known) = known else {
                return Err(ClaimError::Elsewhere { device, pool });
            };
            // Of a request with alternatives, the kubelet knows the first part of the name.
            let request = text(&result["request"]);
            let request = request.split('/').next().unwrap_or_default().to_owned();
            // A container with several devices of a pool sees the same pool.
            let same = |one: &&mut PreparedDevice| one.device_name == device;
            if let Some(one) = devices.iter_mut().find(same) {
                if !one.request_names.contains(&request) {
                    one.request_names.push(request);
                }
                continue;
            }
            self.specify(&known.cdi_device(), &device)?;
            devices.push(PreparedDevice {
                request_names: vec![request],
                pool_name: pool,
                device_name: device,
                cdi_device_ids: vec![known.cdi_device()],
            });
        }
        if devices.is_empty() {
            return Err(ClaimError::Empty);
        }
        Ok(Prepared { devices, error: String::new() })
    }

    /// Writes the specification for the runtime unless the runtime has the same one.
    fn specify(&self, id: &str, device: &str) -> Result<(), ClaimError> {
        let Files { specification, runtime, .. } = &self.files;
        let wrong =
            |file: &Path, why: String| ClaimError::Specification { file: file.to_owned(), why };
        let failed = |file: &Path| {
            let file = file.to_owned();
            move |error: io::Error| ClaimError::Specification { file, why: error.to_string() }
        };
        let text = std::fs::read(specification).map_err(failed(specification))?;
        let value: Value = serde_json::from_slice(&text)
            .map_err(|error| wrong(specification, error.to_string()))?;
        let devices = value["devices"].as_array().map_or(&[][..], Vec::as_slice);
        if !devices.iter().any(|one| one["name"] == device) {
            return Err(wrong(specification, format!("there is no device {id}")));
        }
        if std::fs::read(runtime).is_ok_and(|there| there == text) {
            return Ok(());
        }
        // The runtime reads no half of a file, and no file of this name.
        let new = runtime.with_extension("json.new");
        std::fs::write(&new, &text).map_err(failed(&new))?;
        std::fs::rename(&new, runtime).map_err(failed(runtime))?;
        info!(file = %runtime.display(), "wrote the CDI specification");
        Ok(())
    }
}

/// Nothing was kept of the claims, so no claim can fail.
fn unprepare(request: ClaimsRequest) -> UnprepareResponse {
    let done = request.claims.into_iter().map(|claim| (claim.uid, Unprepared::default()));
    UnprepareResponse { claims: done.collect() }
}

#[derive(Clone)]
struct Calls(Arc<Driver>);

impl Service<http::Request<Body>> for Calls {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let driver = self.0.clone();
        Box::pin(async move {
            let answer = match request.uri().path() {
                dra_api::INFO => {
                    let codec = ProstCodec::<PluginInfo, Empty>::default();
                    let info = move |_: Request<Empty>| {
                        let info = driver.info();
                        async move { Ok(Response::new(info)) }
                    };
                    Grpc::new(codec).unary(tower::service_fn(info), request).await
                }
                dra_api::NOTIFY => {
                    let codec = ProstCodec::<Empty, RegistrationStatus>::default();
                    let notify = move |request: Request<RegistrationStatus>| {
                        driver.notify(request.get_ref());
                        async { Ok(Response::new(Empty {})) }
                    };
                    Grpc::new(codec).unary(tower::service_fn(notify), request).await
                }
                dra_api::PREPARE => {
                    let codec = ProstCodec::<PrepareResponse, ClaimsRequest>::default();
                    let prepare = move |request: Request<ClaimsRequest>| {
                        let driver = driver.clone();
                        async move { Ok(Response::new(driver.prepare(request.into_inner()).await)) }
                    };
                    Grpc::new(codec).unary(tower::service_fn(prepare), request).await
                }
                dra_api::UNPREPARE => {
                    let codec = ProstCodec::<UnprepareResponse, ClaimsRequest>::default();
                    let call = |request: Request<ClaimsRequest>| async {
                        Ok(Response::new(unprepare(request.into_inner())))
                    };
                    Grpc::new(codec).unary(tower::service_fn(call), request).await
                }
                other => Status::unimplemented(format!("no call {other:?}")).into_http(),
            };
            Ok(answer)
        })
    }
}
