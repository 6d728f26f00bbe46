// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The registration of a plugin with the kubelet.

use std::path::Path;
use std::time::{Duration, Instant};

use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic::{Request, client};
use tonic_prost::ProstCodec;
use tracing::{info, warn};

use crate::api::{self, Empty, RegisterRequest};
use crate::plugin::{DevicePlugin, Pool};
use crate::socket::{FileId, Socket, id};

/// Interval of checks of the two sockets. A restarted kubelet refuses pods until the plugin is registered, so
/// the interval is short.
const LOOK: Duration = Duration::from_millis(100);
/// Time limit of a registration: the kubelet connects to the plugin meanwhile, within 10 s.
const LIMIT: Duration = Duration::from_secs(20);
/// How long after a registration the kubelet may watch nothing.
const UNWATCHED: Duration = Duration::from_secs(15);
/// The first and the longest pause after a failed registration.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// Serves a pool, and registers the pool with each kubelet listening in the directory, until the future is
/// dropped. Errors are logged and retried.
pub async fn serve(pool: Pool, directory: &Path) {
    let kubelet = directory.join(api::KUBELET_SOCKET);
    let plugin = DevicePlugin::new(pool.clone());
    let mut socket: Option<Socket> = None;
    let mut known: Option<FileId> = None;
    let mut since = Instant::now();
    let mut pause = PAUSES.0;
    loop {
        if !socket.as_ref().is_some_and(Socket::is_there) {
            // A starting kubelet removes the sockets of all plugins.
            known = None;
            socket = None;
            match Socket::open(directory.join(pool.socket()), plugin.clone()) {
                Ok(open) => socket = Some(open),
                Err(error) => {
                    warn!(pool = pool.resource(), directory = %directory.display(), %error,
                        "cannot make the plugin's socket");
                    tokio::time::sleep(PAUSES.1).await;
                    continue;
                }
            }
        }
        let listening = id(&kubelet);
        if plugin.is_watched() {
            since = Instant::now();
        }
        let is_forgotten = since.elapsed() > UNWATCHED;
        if listening.is_some() && (listening != known || is_forgotten) {
            since = Instant::now();
            match register(&pool, &kubelet).await {
                Ok(()) => {
                    info!(resource = pool.resource(), "registered with the kubelet");
                    (known, pause) = (listening, PAUSES.0);
                }
                Err(error) => {
                    warn!(resource = pool.resource(), %error, "the kubelet did not register it");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSES.1);
                    continue;
                }
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Says to the kubelet where the plugin of a pool listens.
async fn register(pool: &Pool, kubelet: &Path) -> Result<(), tonic::Status> {
    let request = RegisterRequest {
        version: api::VERSION.into(),
        endpoint: pool.socket(),
        resource_name: pool.resource(),
    };
    let failed = |error: tonic::transport::Error| tonic::Status::unavailable(error.to_string());
    let call = async {
        let endpoint = Endpoint::from_shared(format!("unix:{}", kubelet.display()));
        let channel = endpoint.map_err(failed)?.connect().await.map_err(failed)?;
        let mut client = client::Grpc::new(channel);
        client.ready().await.map_err(failed)?;
        let path = PathAndQuery::from_static(api::REGISTER);
        let codec = ProstCodec::<RegisterRequest, Empty>::default();
        client.unary(Request::new(request), path, codec).await.map(|_| ())
    };
    let late = |_| tonic::Status::deadline_exceeded("no answer");
    tokio::time::timeout(LIMIT, call).await.map_err(late)?
}
