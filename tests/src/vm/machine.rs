// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One guest's QEMU: its parts, and its run.

use std::ffi::OsStr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use vhost_device_ism::management::AddGuest;

use super::channel::Channel;
use super::child::Program;
use super::logs::Logs;
use super::paths::{self, Built};
use super::qmp::Qmp;

/// How long a guest may take to boot: some seconds where nothing else runs. `SMC_VM_BOOT_SECONDS`
/// says how long where guests are known to die now and then.
fn boot_limit() -> Duration {
    let seconds = std::env::var("SMC_VM_BOOT_SECONDS").ok();
    let seconds = seconds.map(|text| text.parse().expect("SMC_VM_BOOT_SECONDS is a number"));
    Duration::from_secs(seconds.unwrap_or(300))
}

/// A guest to be started. By default a guest has one device on the daemon's first fabric, 512 MiB, one
/// processor and, if started together with others, a network.
#[derive(Clone, Debug)]
pub struct Vm {
    pub(super) name: String,
    pub(super) ports: Vec<AddGuest>,
    pub(super) net: Option<Net>,
    nics: u32,
    rnics: u32,
    mtu: Option<u32>,
    v1: bool,
    stock: bool,
    unpluggable: bool,
    image: Built,
    mem: Option<String>,
    cpus: Option<u32>,
    append: Vec<String>,
    vsock: Option<PathBuf>,
    qemu: Vec<String>,
}

/// The other end of a guest's network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Net {
    None,
    /// A cable to one other guest; the first end, created before the other.
    PairA,
    PairB,
    /// One Ethernet for all guests of the bed.
    Lan,
}

impl Vm {
    /// A guest called `name`, a single letter. The letter decides the address: `a` is 10.0.0.1.
    pub fn named(name: &str) -> Vm {
        let port = AddGuest { name: Some(name.to_owned()), ..AddGuest::default() };
        Vm {
            name: name.to_owned(),
            ports: vec![port],
            net: None,
            nics: 1,
            rnics: 0,
            mtu: None,
            v1: false,
            stock: false,
            unpluggable: false,
            image: Built::Initrd,
            mem: None,
            cpus: None,
            append: Vec::new(),
            vsock: None,
            qemu: Vec::new(),
        }
    }

    /// With another device; the second is the port `a-2` of the daemon.
    pub fn another_ism(mut self) -> Vm {
        let name = format!("{}-{}", self.name, self.ports.len() + 1);
        self.ports.push(AddGuest { name: Some(name), ..AddGuest::default() });
        self
    }

    /// Without an ISM device.
    pub fn no_ism(mut self) -> Vm {
        self.ports.clear();
        self
    }

    /// With a say in the daemon's port of its last device.
    pub fn port(mut self, tune: impl FnOnce(&mut AddGuest)) -> Vm {
        if let Some(port) = self.ports.last_mut() {
            tune(port);
        }
        self
    }

    /// With its last device by vfio-user.
    pub fn vfio_user(self) -> Vm {
        self.port(|port| port.vfio_user = true)
    }

    /// With its last device on another fabric, four hexadecimal digits.
    pub fn fabric(self, chid: &str) -> Vm {
        self.port(|port| port.chid = Some(chid.to_owned()))
    }

    /// On the Ethernet shared by such guests of a bed, with every network interface.
    pub fn lan(mut self) -> Vm {
        self.net = Some(Net::Lan);
        self
    }

    /// Without a network.
    pub fn no_net(mut self) -> Vm {
        self.net = Some(Net::None);
        self
    }

    /// With so many network interfaces, each to a network of its own: `eth1` is 10.0.1.N and fd00:1::N.
    pub fn nics(mut self, n: u32) -> Vm {
        self.nics = n.max(self.rnics);
        self
    }

    /// With so many RDMA adapters: soft-RoCE on as many network interfaces, `rxe0` on `eth0` and so
    /// on.
    pub fn rnics(mut self, n: u32) -> Vm {
        self.rnics = n;
        self.nics = self.nics.max(n);
        self
    }

    /// With networks whose packets may have so many bytes. An adapter's own packets are the largest power
    /// of two below, at most 4096.
    pub fn mtu(mut self, bytes: u32) -> Vm {
        self.mtu = Some(bytes);
        self
    }

    /// With the kernel whose AF_SMC speaks version 1 of SMC-R over soft-RoCE.
    pub fn v1(mut self) -> Vm {
        self.v1 = true;
        self
    }

    /// With its ISM devices where QEMU's `device_del` can unplug them: `plug0`, `plug1` and so on.
    pub fn unpluggable(mut self) -> Vm {
        self.unpluggable = true;
        self
    }

    /// Under QEMU without this project's patches. The launch script knows no ISM device for this QEMU,
    /// so the guest has none; [`Vm::qemu`] adds the tested devices.
    pub fn stock(mut self) -> Vm {
        self.stock = true;
        self.no_ism()
    }

    /// With the test programs run as a whole in guests: `conformance`, `rendezvous` and `verbs-rxe`.
    pub fn tests(mut self) -> Vm {
        self.image = Built::InitrdTests;
        self
    }

    /// With programs of the distribution: `iperf3`, `redis-server`, `redis-benchmark`, `nginx`, `curl` and
    /// `wrk`.
    /// Whether there are any here, see [`Vm::has_programs`].
    pub fn programs(mut self) -> Vm {
        self.image = Built::InitrdPrograms;
        self
    }

    /// Whether programs of the distribution were there to be put into guests.
    pub fn has_programs() -> bool {
        std::env::var_os("INITRD_PROGRAMS").is_some()
    }

    /// With this much memory, in QEMU's notation: `1G`.
    pub fn mem(mut self, size: &str) -> Vm {
        self.mem = Some(size.to_owned());
        self
    }

    /// With so many processors.
    pub fn cpus(mut self, n: u32) -> Vm {
        self.cpus = Some(n);
        self
    }

    /// With words on the kernel's command line. `tests/vm/init` knows some.
    pub fn append(mut self, words: &str) -> Vm {
        self.append.push(words.to_owned());
        self
    }

    /// With a vsock device, whose back end listens at this socket.
    pub fn vsock(mut self, socket: impl Into<PathBuf>) -> Vm {
        self.vsock = Some(socket.into());
        self
    }

    /// With further arguments for QEMU.
    pub fn qemu<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Vm {
        self.qemu.extend(args.into_iter().map(Into::into));
        self
    }

    /// The IPv4 address on the network of an interface.
    pub(super) fn ip(&self, nic: u32) -> String {
        format!("10.0.{nic}.{}", self.number())
    }

    /// The IPv6 address on the network of an interface.
    pub(super) fn ip6(&self, nic: u32) -> String {
        format!("fd00:{nic:x}::{:x}", self.number())
    }

    fn number(&self) -> u8 {
        match self.name.as_bytes() {
            [letter @ b'a'..=b'z'] => letter - b'a' + 1,
            _ => panic!("{:?} is not a name for a guest: expected one letter, a to z", self.name),
        }
    }
}

/// A running QEMU.
#[derive(Debug)]
pub(super) struct Machine {
    name: String,
    pub(super) program: Program,
    pub(super) channel: Arc<Channel>,
    pub(super) qmp: Mutex<Qmp>,
    /// Number of boots caused by tests.
    boots: AtomicU32,
    /// The log of its console.
    pub(super) console: PathBuf,
}

/// A QEMU waiting for the state of a guest.
#[derive(Debug)]
pub(super) struct Incoming {
    program: Program,
    control: UnixStream,
    pub(super) qmp: Qmp,
    console: PathBuf,
}

/// Where the sockets of a guest are.
#[derive(Debug)]
pub(super) struct Wires<'a> {
    /// The bed's directory.
    pub(super) dir: &'a Path,
    /// The daemon's sockets of its devices.
    pub(super) ism: Vec<PathBuf>,
    /// The Ethernet, in the notation of `qemu/run.sh`: its UDP port, and the address of an interface.
    pub(super) lan: String,
    /// The words before the command of a QEMU.
    pub(super) enter: Vec<String>,
}

impl Machine {
    /// Starts QEMU and connects to its sockets. The guest boots meanwhile.
    #[track_caller]
    pub(super) fn start(vm: &Vm, wires: &Wires<'_>, logs: &Logs) -> Machine {
        let console = logs.path(&format!("{}.console.log", vm.name));
        let Incoming { program, control, qmp, console } =
            Machine::launch(vm, wires, logs, console, false);
        let channel =
            Channel::new(&vm.name, control, logs.open(&format!("{}.control.log", vm.name)));
        let (name, qmp) = (vm.name.clone(), Mutex::new(qmp));
        Machine { name, program, channel, qmp, boots: AtomicU32::new(1), console }
    }

    /// Starts a QEMU waiting for the guest's state. Unpluggable ISM devices must be unplugged already.
    #[track_caller]
    pub(super) fn incoming(vm: &Vm, wires: &Wires<'_>, logs: &Logs) -> Incoming {
        // A console begins with an empty log.
        static NEXT: AtomicU32 = AtomicU32::new(2);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let console = logs.path(&format!("{}.{n}.console.log", vm.name));
        Machine::launch(vm, wires, logs, console, true)
    }

    /// The same guest, whose state another QEMU has now.
    pub(super) fn moved(&self, to: Incoming) -> Machine {
        let Incoming { program, control, qmp, console } = to;
        self.channel.go_on(control);
        Machine {
            name: self.name.clone(),
            program,
            channel: Arc::clone(&self.channel),
            qmp: Mutex::new(qmp),
            boots: AtomicU32::new(self.boots.load(Ordering::Relaxed)),
            console,
        }
    }

    #[track_caller]
    fn launch(
        vm: &Vm,
        wires: &Wires<'_>,
        logs: &Logs,
        console: PathBuf,
        incoming: bool,
    ) -> Incoming {
        let name = &vm.name;
        let at = |kind: &str| wires.dir.join(format!("{name}.{kind}"));
        let (control, qmp) = (at("control"), at("qmp"));
        for stale in [&control, &qmp] {
            let _ = std::fs::remove_file(stale);
        }
        let mut args = wires.enter.clone();
        args.extend([text(&paths::run_script()), "--reboot".into()]);
        let mut option = |name: &str, value: String| args.extend([name.to_owned(), value]);
        option("--name", name.clone());
        for (socket, port) in wires.ism.iter().zip(&vm.ports).filter(|_| !vm.unpluggable) {
            let protocol = if port.vfio_user { ",vfio-user" } else { "" };
            option("--ism", text(socket) + protocol);
        }
        let cables: Vec<PathBuf> =
            (0..vm.nics).map(|n| wires.dir.join(format!("net{n}"))).collect();
        match vm.net {
            None | Some(Net::None) => {}
            Some(Net::PairA) => {
                cables.iter().for_each(|cable| option("--net", format!("pair-a:{}", text(cable))));
            }
            Some(Net::PairB) => {
                cables.iter().for_each(|cable| option("--net", format!("pair-b:{}", text(cable))));
            }
            Some(Net::Lan) => {
                (0..vm.nics).for_each(|_| option("--net", format!("lan:{}", wires.lan)));
            }
        }
        if let Some(socket) = &vm.vsock {
            option("--vsock", text(socket));
        }
        option("--control", text(&control));
        option("--qmp", text(&qmp));
        option("--console", text(&console));
        let mut append = vm.append.clone();
        append.extend((vm.rnics > 0).then(|| format!("ism.rnics={}", vm.rnics)));
        append.extend(vm.mtu.map(|mtu| format!("ism.mtu={mtu}")));
        if !append.is_empty() {
            option("--append", append.join(" "));
        }
        args.push("--".into());
        args.extend(vm.qemu.iter().cloned());
        for (n, socket) in wires.ism.iter().enumerate().filter(|_| vm.unpluggable) {
            args.extend(root_port(n));
            // Such a device is plugged in when the guest's state has come.
            args.extend((!incoming).then(|| in_root_port(n, &text(socket))).into_iter().flatten());
        }
        if incoming {
            args.extend(["-incoming".into(), "defer".into()]);
        }
        let qemu = if vm.stock { Built::QemuStock } else { Built::Qemu }.path();
        let kernel = if vm.v1 { Built::KernelV1 } else { Built::Kernel }.path();
        let initrd = vm.image.path();
        let cpus = vm.cpus.map(|n| n.to_string());
        let mut env: Vec<(&str, &OsStr)> =
            vec![("QEMU", qemu.as_ref()), ("KERNEL", kernel.as_ref()), ("INITRD", initrd.as_ref())];
        env.extend(vm.mem.as_ref().map(|mem| ("MEM", mem.as_ref())));
        env.extend(cpus.as_ref().map(|cpus| ("CPUS", cpus.as_ref())));

        let program = Program::start(name, &args, &env, &logs.open(&format!("{name}.qemu.log")));
        let control = connect(name, &program, &control);
        let qmp = Qmp::new(connect(name, &program, &qmp));
        let qmp = qmp.unwrap_or_else(|error| panic!("{name}: QMP: {error}"));
        if vm.net == Some(Net::PairA) {
            let start = Instant::now();
            while !cables.iter().all(|cable| cable.exists()) {
                alive(name, &program);
                assert!(start.elapsed() < boot_limit(), "{name} has not opened its network");
                thread::sleep(Duration::from_millis(5));
            }
        }
        Incoming { program, control, qmp, console }
    }

    /// Notes a boot about to be caused.
    pub(super) fn will_boot(&self) {
        self.boots.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until the guest has booted `boots` times.
    #[track_caller]
    pub(super) fn wait_boots(&self, boots: u32) {
        let limit = boot_limit();
        if !self.channel.wait_boots(boots, limit) {
            alive(&self.name, &self.program);
            panic!("{} has not booted within {limit:?}", self.name);
        }
    }
}

impl Drop for Machine {
    /// Reports unexpected boots: a processor gone astray restarts the guest silently.
    fn drop(&mut self) {
        let (boots, meant) = (self.channel.boots(), self.boots.load(Ordering::Relaxed));
        if boots > meant {
            eprintln!("{} has booted on its own: {boots} boots instead of {meant}", self.name);
        }
    }
}

#[track_caller]
fn alive(name: &str, program: &Program) {
    if let Some(status) = program.ended() {
        panic!("QEMU of {name} has ended: {status}");
    }
}

#[track_caller]
fn connect(name: &str, program: &Program, path: &Path) -> UnixStream {
    let start = Instant::now();
    loop {
        if let Ok(socket) = UnixStream::connect(path) {
            return socket;
        }
        alive(name, program);
        assert!(start.elapsed() < boot_limit(), "QEMU of {name} has not opened {}", path.display());
        thread::sleep(Duration::from_millis(5));
    }
}

/// QEMU's arguments for a slot with hotplug: the root complex itself has none.
fn root_port(n: usize) -> [String; 2] {
    let port = format!("pcie-root-port,id=plug-port{n},chassis={n},slot={n},pref64-reserve=128G");
    ["-device".into(), port]
}

/// QEMU's arguments for a device in such a place.
fn in_root_port(n: usize, socket: &str) -> [String; 4] {
    [
        "-chardev".into(),
        format!("socket,id=plug-socket{n},path={socket},reconnect-ms=200"),
        "-device".into(),
        format!("vhost-user-ism-pci,id=plug{n},bus=plug-port{n},chardev=plug-socket{n},romfile="),
    ]
}

fn text(path: &Path) -> String {
    path.to_str().unwrap_or_else(|| panic!("{}: not UTF-8", path.display())).to_owned()
}
