// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A double of the kubelet's device manager, with the same steps towards plugins in the same order.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use smc_device_plugin::api::*;
use tokio::net::UnixListener;
use tokio::task::{JoinHandle, JoinSet};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, client, server};
use tonic_prost::ProstCodec;

/// The state of one kubelet.
#[derive(Default)]
pub(crate) struct Known {
    /// Devices by resource; none is left of a plugin whose stream has ended.
    pub(crate) devices: Mutex<HashMap<String, Vec<Device>>>,
    /// The endpoint of each resource.
    endpoints: Mutex<HashMap<String, PathBuf>>,
    /// Registrations so far.
    pub(crate) registrations: AtomicUsize,
    /// Number of registrations to refuse from now on.
    pub(crate) refusals: AtomicUsize,
    /// How long a registration takes.
    pub(crate) delay: Mutex<Duration>,
    /// Devices of containers.
    used: Mutex<HashSet<String>>,
    watches: Mutex<JoinSet<()>>,
}

pub(crate) struct Kubelet {
    pub(crate) known: Arc<Known>,
    directory: PathBuf,
    server: JoinHandle<()>,
}

impl Kubelet {
    /// Starts like the kubelet: removes everything in the directory but the checkpoint.
    pub(crate) fn start(directory: &Path) -> Kubelet {
        for entry in std::fs::read_dir(directory).unwrap().flatten() {
            if entry.file_name() != "kubelet_internal_checkpoint" {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        Kubelet::start_beside(directory)
    }

    /// Starts, and removes its own socket only.
    pub(crate) fn start_beside(directory: &Path) -> Kubelet {
        let socket = directory.join(KUBELET_SOCKET);
        let _ = std::fs::remove_file(&socket);
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let known = Arc::new(Known::default());
        let service = Registration { known: known.clone(), directory: directory.into() };
        let server = tokio::spawn(async move {
            Server::builder().serve_with_incoming(service, incoming).await.unwrap();
        });
        Kubelet { known, directory: directory.into(), server }
    }

    /// Ends as by SIGKILL: its socket stays, without a listener.
    pub(crate) async fn kill(mut self) {
        self.server.abort();
        let _ = (&mut self.server).await;
        self.forget();
    }

    /// Ends all connections to plugins.
    pub(crate) fn forget(&self) {
        self.known.watches.lock().unwrap().abort_all();
        self.known.devices.lock().unwrap().clear();
    }

    /// The devices of a resource.
    pub(crate) fn devices(&self, resource: &str) -> Vec<Device> {
        self.known.devices.lock().unwrap().get(resource).cloned().unwrap_or_default()
    }

    /// Admits a container with one unused device of a resource, and returns the plugin's answer. The kubelet
    /// refuses a pod with an unknown or used up resource.
    pub(crate) async fn admit(&self, resource: &str) -> Result<Vec<String>, Status> {
        let devices = self.devices(resource);
        let healthy = devices.into_iter().filter(|device| device.health == HEALTHY);
        let id = {
            let mut used = self.known.used.lock().unwrap();
            let free = healthy.map(|device| device.id).find(|id| !used.contains(id));
            let id = free.ok_or_else(|| Status::resource_exhausted(resource.to_owned()))?;
            used.insert(id.clone());
            id
        };
        self.allocate(resource, &[&id]).await
    }

    /// The plugin's answer for a container with these devices.
    pub(crate) async fn allocate(
        &self,
        resource: &str,
        ids: &[&str],
    ) -> Result<Vec<String>, Status> {
        let endpoint = self.known.endpoints.lock().unwrap().get(resource).unwrap().clone();
        let mut client = connect(&self.directory.join(endpoint)).await?;
        let device_ids = ids.iter().map(|id| (*id).to_owned()).collect();
        let request =
            AllocateRequest { container_requests: vec![ContainerAllocateRequest { device_ids }] };
        let codec = ProstCodec::<AllocateRequest, AllocateResponse>::default();
        let path = PathAndQuery::from_static(ALLOCATE);
        let answer = client.unary(Request::new(request), path, codec).await?.into_inner();
        let containers = answer.container_responses;
        Ok(containers.into_iter().flat_map(|one| one.cdi_devices).map(|one| one.name).collect())
    }
}

async fn connect(socket: &Path) -> Result<client::Grpc<Channel>, Status> {
    let failed = |error: tonic::transport::Error| Status::unavailable(error.to_string());
    let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
    let dial = endpoint.connect();
    let channel = tokio::time::timeout(smc_test_support::TIMEOUT, dial).await;
    let channel = channel.map_err(|_| Status::unavailable("failed to dial the plugin"))?;
    let mut client = client::Grpc::new(channel.map_err(failed)?);
    client.ready().await.map_err(failed)?;
    Ok(client)
}

#[derive(Clone)]
struct Registration {
    known: Arc<Known>,
    directory: PathBuf,
}

impl Registration {
    /// Registers: connects to the plugin before the answer, and watches its devices from then on.
    async fn register(self, request: RegisterRequest) -> Result<Response<Empty>, Status> {
        self.known.registrations.fetch_add(1, Ordering::Relaxed);
        let delay = *self.known.delay.lock().unwrap();
        tokio::time::sleep(delay).await;
        let refuse = |n: usize| n.checked_sub(1);
        if self.known.refusals.fetch_update(Ordering::Relaxed, Ordering::Relaxed, refuse).is_ok() {
            return Err(Status::unknown("refused"));
        }
        if request.version != "v1beta1" || !request.resource_name.contains('/') {
            return Err(Status::unknown("a version or a resource that no kubelet knows"));
        }
        let resource = request.resource_name;
        let mut client = connect(&self.directory.join(&request.endpoint)).await?;
        self.known.endpoints.lock().unwrap().insert(resource.clone(), request.endpoint.into());
        let known = self.known.clone();
        self.known.watches.lock().unwrap().spawn(async move {
            let codec = ProstCodec::<Empty, ListAndWatchResponse>::default();
            let path = PathAndQuery::from_static(LIST_AND_WATCH);
            let stream = client.server_streaming(Request::new(Empty {}), path, codec).await;
            let mut stream = stream.unwrap().into_inner();
            while let Ok(Some(list)) = stream.message().await {
                known.devices.lock().unwrap().insert(resource.clone(), list.devices);
            }
            // Its devices are unhealthy from here on.
            known.devices.lock().unwrap().remove(&resource);
        });
        Ok(Response::new(Empty {}))
    }
}

impl Service<http::Request<Body>> for Registration {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let own = self.clone();
        Box::pin(async move {
            assert_eq!(request.uri().path(), REGISTER);
            let codec = ProstCodec::<Empty, RegisterRequest>::default();
            let register =
                move |request: Request<RegisterRequest>| own.clone().register(request.into_inner());
            Ok(server::Grpc::new(codec).unary(tower::service_fn(register), request).await)
        })
    }
}
