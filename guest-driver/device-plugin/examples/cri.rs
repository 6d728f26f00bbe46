// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client of a container runtime like the kubelet (CRI v1), for scripts:
//!
//!     cri SOCKET IMAGE DEVICE SERVER CLIENT LOOK
//!
//! Runs a pod on the host's network with two containers and the CDI device: one with the command SERVER, and
//! one with CLIENT, which has to succeed. Then prints the output of LOOK in the first, and removes the pod.
//! Commands are shell commands.
#![allow(clippy::unwrap_used, reason = "a client that cannot go on ends")]
#![allow(missing_docs, reason = "the messages are those of the CRI")]

use std::path::Path;
use std::time::Duration;

use prost::Message;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, client};
use tonic_prost::ProstCodec;

/// The namespaces of the host.
const NODE: i32 = 2;
/// State of an exited container.
const EXITED: i32 = 2;

#[derive(Clone, PartialEq, Message)]
struct Metadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    namespace: String,
}

#[derive(Clone, PartialEq, Message)]
struct NamespaceOption {
    #[prost(int32, tag = "1")]
    network: i32,
}

#[derive(Clone, PartialEq, Message)]
struct SandboxSecurity {
    #[prost(message, optional, tag = "1")]
    namespaces: Option<NamespaceOption>,
}

#[derive(Clone, PartialEq, Message)]
struct LinuxSandbox {
    #[prost(message, optional, tag = "2")]
    security: Option<SandboxSecurity>,
}

#[derive(Clone, PartialEq, Message)]
struct SandboxConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<Metadata>,
    #[prost(message, optional, tag = "8")]
    linux: Option<LinuxSandbox>,
}

#[derive(Clone, PartialEq, Message)]
struct RunPodSandbox {
    #[prost(message, optional, tag = "1")]
    config: Option<SandboxConfig>,
}

/// A message with a single text: an id, an image or a CDI device.
#[derive(Clone, PartialEq, Message)]
struct Text {
    #[prost(string, tag = "1")]
    text: String,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerSecurity {
    #[prost(message, optional, tag = "3")]
    namespaces: Option<NamespaceOption>,
}

#[derive(Clone, PartialEq, Message)]
struct LinuxContainer {
    #[prost(message, optional, tag = "2")]
    security: Option<ContainerSecurity>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<Text>,
    #[prost(message, optional, tag = "2")]
    image: Option<Text>,
    #[prost(string, repeated, tag = "3")]
    command: Vec<String>,
    #[prost(message, optional, tag = "15")]
    linux: Option<LinuxContainer>,
    #[prost(message, repeated, tag = "17")]
    cdi_devices: Vec<Text>,
}

#[derive(Clone, PartialEq, Message)]
struct CreateContainer {
    #[prost(string, tag = "1")]
    sandbox: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<SandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "3")]
    state: i32,
    #[prost(int32, tag = "7")]
    exit_code: i32,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerStatus {
    #[prost(message, optional, tag = "1")]
    status: Option<Status>,
}

#[derive(Clone, PartialEq, Message)]
struct ExecSync {
    #[prost(string, tag = "1")]
    container: String,
    #[prost(string, repeated, tag = "2")]
    command: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct ExecAnswer {
    #[prost(bytes, tag = "1")]
    stdout: Vec<u8>,
    #[prost(bytes, tag = "2")]
    stderr: Vec<u8>,
    #[prost(int32, tag = "3")]
    exit_code: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Empty {}

struct Runtime {
    client: client::Grpc<Channel>,
    sandbox: SandboxConfig,
    image: String,
    device: String,
}

impl Runtime {
    async fn connect(socket: &Path, image: &str, device: &str) -> Runtime {
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
        let client = client::Grpc::new(endpoint.connect().await.unwrap());
        let name = |name: &str| name.to_owned();
        let sandbox = SandboxConfig {
            metadata: Some(Metadata { name: name("pod"), uid: name("1"), namespace: name("test") }),
            linux: Some(LinuxSandbox {
                security: Some(SandboxSecurity {
                    namespaces: Some(NamespaceOption { network: NODE }),
                }),
            }),
        };
        Runtime { client, sandbox, image: image.to_owned(), device: device.to_owned() }
    }

    async fn call<A, B>(&mut self, call: &'static str, request: A) -> B
    where
        A: Message + 'static,
        B: Message + Default + 'static,
    {
        self.client.ready().await.unwrap();
        let path = PathAndQuery::from_maybe_shared(format!("/runtime.v1.RuntimeService/{call}"));
        let codec = ProstCodec::<A, B>::default();
        let answer = self.client.unary(Request::new(request), path.unwrap(), codec).await;
        answer.unwrap_or_else(|status| panic!("{call}: {status}")).into_inner()
    }

    /// Starts a container of the pod, and returns its id.
    async fn start(&mut self, sandbox: &str, name: &str, command: &str) -> String {
        let config = ContainerConfig {
            metadata: Some(Text { text: name.to_owned() }),
            image: Some(Text { text: self.image.clone() }),
            command: shell(command),
            linux: Some(LinuxContainer {
                security: Some(ContainerSecurity {
                    namespaces: Some(NamespaceOption { network: NODE }),
                }),
            }),
            cdi_devices: vec![Text { text: self.device.clone() }],
        };
        let request = CreateContainer {
            sandbox: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: Some(self.sandbox.clone()),
        };
        let container: Text = self.call("CreateContainer", request).await;
        let _: Empty = self.call("StartContainer", container.clone()).await;
        container.text
    }
}

fn shell(command: &str) -> Vec<String> {
    ["/bin/sh", "-c", command].map(str::to_owned).into()
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [socket, image, device, server, client, look] = &args[..] else {
        panic!("SOCKET IMAGE DEVICE SERVER CLIENT LOOK");
    };
    let mut runtime = Runtime::connect(Path::new(socket), image, device).await;
    let request = RunPodSandbox { config: Some(runtime.sandbox.clone()) };
    let pod: Text = runtime.call("RunPodSandbox", request).await;
    let web = runtime.start(&pod.text, "server", server).await;
    let asks = runtime.start(&pod.text, "client", client).await;
    let status = loop {
        let request = Text { text: asks.clone() };
        let answer: ContainerStatus = runtime.call("ContainerStatus", request).await;
        match answer.status.unwrap() {
            status if status.state == EXITED => break status,
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    };
    let request = ExecSync { container: web, command: shell(look) };
    let answer: ExecAnswer = runtime.call("ExecSync", request).await;
    print!(
        "{}{}",
        String::from_utf8_lossy(&answer.stdout),
        String::from_utf8_lossy(&answer.stderr)
    );
    let _: Empty = runtime.call("StopPodSandbox", pod.clone()).await;
    let _: Empty = runtime.call("RemovePodSandbox", pod).await;
    assert_eq!(
        (status.exit_code, answer.exit_code),
        (0, 0),
        "what the client and LOOK have returned"
    );
}
