// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver of dynamic resource allocation against doubles of the kubelet and of the API server: each of the
//! three starts, restarts and dies in any order, and files are lost.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod api_double;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use api_double::ApiDouble;
use hyper::Method;
use serde_json::{Value, json};
use smc_device_plugin::api::Empty;
use smc_device_plugin::dra_api::{
    Claim, ClaimsRequest, INFO, NOTIFY, PREPARE, PluginInfo, PrepareResponse, Prepared,
    RegistrationStatus, UNPREPARE, UnprepareResponse,
};
use smc_device_plugin::{ApiServer, Files, Node, drive};
use smc_test_support::{TIMEOUT, TestDir, leave_out};
use tokio::task::JoinHandle;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, client};
use tonic_prost::ProstCodec;

const SLICE: &str = "/apis/resource.k8s.io/v1/resourceslices/node-1-virtio-ism";
const SPECIFICATION: &str =
    r#"{"kind":"virtio-ism/fabric","devices":[{"name":"any"},{"name":"red"}]}"#;

/// A node with a driver's files.
struct Host(TestDir);

impl Host {
    fn new() -> Host {
        let host = Host(TestDir::new());
        fs::write(host.0.path("token"), "secret\n").unwrap();
        fs::write(host.0.path("kept.json"), SPECIFICATION).unwrap();
        host
    }

    fn runtime(&self) -> PathBuf {
        self.0.path("smc.json")
    }

    fn socket(&self) -> PathBuf {
        self.0.path("virtio-ism.sock")
    }

    fn driver(&self, pools: &[&str], address: &str) -> JoinHandle<()> {
        let pools = pools.iter().map(|pool| pool.parse().unwrap()).collect();
        let files = Files {
            registry: self.0.to_owned(),
            specification: self.0.path("kept.json"),
            runtime: self.runtime(),
        };
        let server = ApiServer::new(address, &self.0).unwrap();
        tokio::spawn(drive(Node::new("node-1", pools).unwrap(), files, server))
    }

    /// Registers the driver as a kubelet does that has found the socket.
    async fn register(&self) -> Kubelet {
        let begun = Instant::now();
        // A killed driver has left a socket without a listener.
        let mut registry = loop {
            match Kubelet::connect(&self.socket()).await {
                Ok(registry) => break registry,
                Err(error) => assert!(begun.elapsed() < TIMEOUT, "the driver listens: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let info: PluginInfo = registry.call(INFO, Empty {}).await.unwrap();
        assert_eq!((info.kind.as_str(), info.name.as_str()), ("DRAPlugin", "virtio-ism"));
        assert_eq!(info.supported_versions, ["v1.DRAPlugin"]);
        let kubelet = Kubelet::connect(info.endpoint.as_ref()).await.unwrap();
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        let _: Empty = registry.call(NOTIFY, status).await.unwrap();
        kubelet
    }
}

/// The kubelet as a client of the driver.
struct Kubelet(client::Grpc<Channel>);

impl Kubelet {
    async fn connect(socket: &std::path::Path) -> Result<Kubelet, tonic::transport::Error> {
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display()))?;
        Ok(Kubelet(client::Grpc::new(endpoint.connect().await?)))
    }

    async fn call<Q, A>(&mut self, path: &'static str, request: Q) -> Result<A, Status>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        self.0.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let codec = ProstCodec::<Q, A>::default();
        let path = PathAndQuery::from_static(path);
        Ok(self.0.unary(Request::new(request), path, codec).await?.into_inner())
    }

    async fn prepare(&mut self, claims: &[&str]) -> PrepareResponse {
        self.call(PREPARE, request(claims)).await.unwrap()
    }

    /// The devices of a claim that can be prepared.
    async fn devices(&mut self, claim: &str) -> Prepared {
        let mut answer = self.prepare(&[claim]).await;
        let prepared = answer.claims.remove(&format!("uid-{claim}")).unwrap();
        assert_eq!(prepared.error, "");
        prepared
    }
}

fn request(claims: &[&str]) -> ClaimsRequest {
    let claim = |name: &&str| Claim {
        namespace: "default".into(),
        uid: format!("uid-{name}"),
        name: (*name).into(),
    };
    ClaimsRequest { claims: claims.iter().map(claim).collect() }
}

/// A server with the node, and a claim for two requests of one pool.
async fn cluster() -> ApiDouble {
    let api = ApiDouble::start("secret").await;
    api.put("/api/v1/nodes/node-1", Some(json!({"metadata": {"uid": "uid-node"}})));
    claim(&api, "pair", "uid-pair", &[("web", "any", "node-1"), ("client/first", "any", "node-1")]);
    api
}

fn claim(api: &ApiDouble, name: &str, uid: &str, results: &[(&str, &str, &str)]) {
    let result = |(request, device, pool): &(&str, &str, &str)| json!({"request": request, "driver": "virtio-ism", "pool": pool, "device": device});
    let mut results: Vec<Value> = results.iter().map(result).collect();
    results.push(
        json!({"request": "gpu", "driver": "gpu.example.com", "pool": "x", "device": "gpu-0"}),
    );
    let path = format!("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{name}");
    let allocation = json!({"devices": {"results": results}});
    api.put(&path, Some(json!({"metadata": {"uid": uid}, "status": {"allocation": allocation}})));
}

async fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < TIMEOUT, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn is_published(api: &ApiDouble) -> Value {
    eventually("the slice is published", || api.get(SLICE).is_some()).await;
    api.get(SLICE).unwrap()
}

#[tokio::test]
async fn pools_are_published_and_two_requests_get_one_fabric() {
    let (host, api) = (Host::new(), cluster().await);
    let driver = host.driver(&["any=32", "red=2@ff01"], &api.address);
    let slice = is_published(&api).await;
    assert_eq!(slice["spec"]["nodeName"], "node-1");
    assert_eq!(
        slice["spec"]["pool"],
        json!({"name": "node-1", "generation": 1, "resourceSliceCount": 1})
    );
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "uid-node");
    let device = &slice["spec"]["devices"][1];
    assert_eq!(device["name"], "red");
    assert_eq!(device["allowMultipleAllocations"], true);
    assert_eq!(device["attributes"]["fabric"]["string"], "ff01");
    assert_eq!(device["attributes"]["window"]["bool"], true);
    assert_eq!(device["capacity"]["containers"]["value"], "2");

    let mut kubelet = host.register().await;
    let first = kubelet.devices("pair").await;
    assert_eq!(first.devices.len(), 1);
    assert_eq!(first.devices[0].request_names, ["web", "client"]);
    assert_eq!(first.devices[0].cdi_device_ids, ["virtio-ism/fabric=any"]);
    assert_eq!(
        (first.devices[0].pool_name.as_str(), first.devices[0].device_name.as_str()),
        ("node-1", "any")
    );
    // The runtime's file is written, and again only when lost or changed.
    let inode = || fs::metadata(host.runtime()).unwrap().ino();
    let written = inode();
    assert_eq!(kubelet.devices("pair").await, first);
    assert_eq!(inode(), written);
    for lose in [|file: PathBuf| fs::remove_file(file), |file| fs::write(file, "{}")] {
        lose(host.runtime()).unwrap();
        assert_eq!(kubelet.devices("pair").await, first);
        assert_eq!(fs::read_to_string(host.runtime()).unwrap(), SPECIFICATION);
    }
    // Claims that are gone, were never prepared, or have no name: without the API server, too.
    drop(api);
    let done: UnprepareResponse =
        kubelet.call(UNPREPARE, request(&["pair", "pair", "gone", ""])).await.unwrap();
    assert_eq!(done.claims.len(), 3);
    assert!(done.claims.values().all(|one| one.error.is_empty()));
    driver.abort();
}

#[tokio::test]
async fn a_slice_that_is_lost_or_changed_is_written_again() {
    let (host, api) = (Host::new(), cluster().await);
    api.refuse(2);
    let driver = host.driver(&["any"], &api.address);
    let first = is_published(&api).await;
    api.put(SLICE, None);
    is_published(&api).await;
    let changed = |edit: fn(&mut Value)| {
        let mut other = api.get(SLICE).unwrap();
        edit(&mut other);
        api.put(SLICE, Some(other));
    };
    changed(|slice| slice["spec"]["devices"] = json!([]));
    let is_right =
        || api.get(SLICE).is_some_and(|slice| slice["spec"]["devices"] == first["spec"]["devices"]);
    eventually("devices are back", is_right).await;
    assert_eq!(api.get(SLICE).unwrap()["spec"]["pool"]["generation"], 2);
    changed(|slice| slice["spec"]["nodeName"] = json!("node-2"));
    eventually("the node is back", || {
        api.get(SLICE).is_some_and(|slice| slice["spec"] == first["spec"])
    })
    .await;
    let mut defaults = api.get(SLICE).unwrap();
    defaults["spec"]["devices"][0]["later"] = json!(true);
    let writes = api.writes();
    assert_eq!(writes, [Method::POST, Method::POST, Method::PUT, Method::DELETE, Method::POST]);
    api.put(SLICE, Some(defaults));
    driver.abort();
    let _ = driver.await;

    // The next driver finds a slice that is right, and then one of fewer pools.
    let driver = host.driver(&["any"], &api.address);
    let _kubelet = host.register().await;
    driver.abort();
    let _ = driver.await;
    assert!(!host.socket().exists());
    let driver = host.driver(&["any", "red"], &api.address);
    let both = || api.get(SLICE).unwrap()["spec"]["devices"].as_array().unwrap().len() == 2;
    eventually("there are two devices", both).await;
    assert_eq!(api.writes()[writes.len()..], [Method::PUT]);
    driver.abort();
}

#[tokio::test]
async fn kubelet_driver_and_server_restart_in_any_order() {
    let (host, api) = (Host::new(), cluster().await);
    let mut driver = host.driver(&["any"], &api.address);
    let mut kubelet = host.register().await;
    is_published(&api).await;
    for round in 0..6 {
        if round % 2 == 0 {
            driver.abort();
            let _ = (&mut driver).await;
            drop(std::os::unix::net::UnixListener::bind(host.socket()).unwrap());
            driver = host.driver(&["any"], &api.address);
            kubelet = host.register().await;
        }
        // A starting kubelet removes the slices, and lost sockets are made again.
        if round % 3 == 0 {
            fs::remove_file(host.socket()).unwrap();
            api.put(SLICE, None);
            kubelet = host.register().await;
            is_published(&api).await;
        }
        api.renew_token("not yet the driver's");
        let refused = kubelet.prepare(&["pair"]).await;
        assert!(refused.claims["uid-pair"].error.contains("401"), "{refused:?}");
        api.renew_token("secret");
        assert_eq!(kubelet.devices("pair").await.devices.len(), 1);
    }
    driver.abort();
}

#[tokio::test]
async fn a_wrong_claim_has_an_error_of_its_own_and_stops_no_other() {
    let (host, api) = (Host::new(), cluster().await);
    claim(&api, "other", "uid-later", &[("web", "any", "node-1")]);
    claim(&api, "elsewhere", "uid-elsewhere", &[("web", "any", "node-2")]);
    claim(&api, "unknown", "uid-unknown", &[("web", "blue", "node-1")]);
    claim(&api, "none", "uid-none", &[]);
    claim(&api, "left", "uid-left", &[("web", "green", "node-1")]);
    let claims = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";
    api.put(&format!("{claims}/text"), Some(json!({"metadata": {}})));
    api.put(&format!("{claims}/long"), Some(json!({"metadata": {"uid": "x".repeat(3 << 20)}})));
    let driver = host.driver(&["any", "green"], &api.address);
    let mut kubelet = host.register().await;
    let errors = [
        ("other", "the claim has the identity \"uid-later\" and not \"uid-other\""),
        ("elsewhere", "the device \"any\" of \"node-2\", which is not on this node"),
        ("unknown", "the device \"blue\" of \"node-1\", which is not on this node"),
        ("none", "no device of virtio-ism"),
        ("left", "there is no device virtio-ism/fabric=green"),
        ("text", "the claim has the identity \"\""),
        ("long", "cannot be read"),
        ("gone", "404"),
        ("../pair", "no claim has the name"),
        ("pair?x", "no claim has the name"),
    ];
    let mut names: Vec<&str> = errors.iter().map(|error| error.0).collect();
    names.push("pair");
    let mut answer = kubelet.prepare(&names).await;
    for (name, why) in errors {
        let error = answer.claims.remove(&format!("uid-{name}")).unwrap().error;
        assert!(error.contains(why), "{name}: {error}");
    }
    assert_eq!(answer.claims["uid-pair"].error, "");
    assert_eq!(answer.claims.len(), 1);
    driver.abort();
}

#[tokio::test]
async fn a_server_without_shared_devices_is_not_written_again_and_again() {
    let (host, api) = (Host::new(), cluster().await);
    api.be_old();
    let driver = host.driver(&["any"], &api.address);
    is_published(&api).await;
    // Each look writes once, and its own write is no reason for another.
    for looks in 1..4 {
        host.register().await;
        eventually("one look", || api.writes().len() >= looks).await;
    }
    assert!(api.writes().len() <= 4, "{:?}", api.writes());
    driver.abort();
}

#[tokio::test]
async fn the_token_goes_to_a_server_with_the_certificate_of_the_account_only() {
    if Command::new("openssl").arg("version").output().is_err() {
        return leave_out("there is no openssl for certificates");
    }
    let host = Host::new();
    for authority in ["ca", "other"] {
        authority_of(&host.0, authority);
    }
    let sign = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=api \
                -keyout server.key -out server.csr && \
                printf 'subjectAltName=IP:127.0.0.1\\n' >names && \
                openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -days 2 -extfile names -out server.crt";
    openssl(&host.0, sign);
    let api = ApiDouble::start_tls("secret", &host.0).await;
    api.put("/api/v1/nodes/node-1", Some(json!({"metadata": {"uid": "uid-node"}})));

    let call = async |account: PathBuf| {
        let server = ApiServer::new(&api.address, &account).unwrap();
        server.call(Method::GET, "/api/v1/nodes/node-1", None).await
    };
    assert_eq!(call(host.0.to_path_buf()).await.unwrap()["metadata"]["uid"], "uid-node");
    let account = host.0.path("account");
    fs::create_dir(&account).unwrap();
    fs::write(account.join("token"), "secret").unwrap();
    fs::copy(host.0.path("other.crt"), account.join("ca.crt")).unwrap();
    let refused = call(account).await.unwrap_err().to_string();
    assert!(refused.contains("invalid peer certificate"), "{refused}");

    // The token is read again for each call.
    api.renew_token("renewed");
    let driver = host.driver(&["any"], &api.address);
    let old = call(host.0.to_path_buf()).await.unwrap_err().to_string();
    assert!(old.contains("401"), "{old}");
    fs::write(host.0.path("token"), "renewed").unwrap();
    is_published(&api).await;
    driver.abort();
}

fn authority_of(directory: &std::path::Path, name: &str) {
    let make = format!(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name} \
         -keyout {name}.key -out {name}.crt"
    );
    openssl(directory, &make);
}

fn openssl(directory: &std::path::Path, commands: &str) {
    let output =
        Command::new("sh").arg("-ec").arg(commands).current_dir(directory).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
