//! What virtual machines are made of. Kernel and QEMU are built once and kept outside of the
//! repository, by the hash of what they are built from; programs are cargo's business.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::image::{self, Contents};
use crate::programs;
use crate::tool::{self, ToolError};

/// Packages whose programs the guests or the tests run.
const PACKAGES: [&str; 8] =
    ["-p", "vhost-device-ism", "-p", "smc-cli", "-p", "smc-tests", "-p", "smc-preload"];
const FEATURES: [&str; 2] = ["--features", "smc-tests/vm"];

/// Debian packages of the libraries that QEMU is linked with.
const LIBRARIES: [&str; 3] = ["libglib2.0-dev", "libpixman-1-dev", "libfdt-dev"];

/// Which programs of the distribution guests are to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// Those that are quick to install.
    Usual,
    /// Also those that bring hundreds of megabytes.
    All,
}

/// Paths of executables, by name.
type Executables = Vec<(String, PathBuf)>;

/// Paths of everything.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) kernel: PathBuf,
    /// Whose AF_SMC speaks version 1 of SMC-R over soft-RoCE.
    pub(crate) kernel_v1: PathBuf,
    pub(crate) initrd: PathBuf,
    /// The same with test programs that run in guests as a whole.
    pub(crate) initrd_tests: PathBuf,
    /// The usual one with programs of the distribution.
    pub(crate) initrd_programs: Option<PathBuf>,
    pub(crate) qemu: PathBuf,
    pub(crate) qemu_stock: PathBuf,
    pub(crate) daemon: PathBuf,
    /// The executable of the tests.
    pub(crate) tests: PathBuf,
}

impl Parts {
    /// What the tests are told in their environment.
    pub(crate) fn variables(&self) -> Vec<(&'static str, &Path)> {
        let mut variables: Vec<(_, &Path)> = vec![
            ("KERNEL", &self.kernel),
            ("KERNEL_V1", &self.kernel_v1),
            ("INITRD", &self.initrd),
            ("INITRD_TESTS", &self.initrd_tests),
            ("QEMU", &self.qemu),
            ("QEMU_STOCK", &self.qemu_stock),
            ("DAEMON", &self.daemon),
        ];
        variables.extend(self.initrd_programs.as_deref().map(|path| ("INITRD_PROGRAMS", path)));
        variables
    }
}

/// Builds what is not there. Kernel and QEMU can be given by `KERNEL`, `KERNEL_V1`, `QEMU`,
/// `QEMU_STOCK`.
///
/// # Errors
/// A package is missing, or something does not build; its output has been shown.
pub(crate) fn build(root: &Path, install: bool, which: Which) -> Result<Parts, ToolError> {
    let may_install = install || tool::is_true("CI");
    let busybox = installed(image::busybox, may_install)?;
    let verbs = installed(image::verbs, may_install)?;
    let ip = installed(|| image::program("ip", "iproute2"), may_install)?;
    let tc = installed(|| image::program("tc", "iproute2"), may_install)?;
    let install: &[&str] = if install { &["--install-deps"] } else { &[] };
    // Each of them has long stretches that keep one processor busy only.
    let (kernels, qemus, built) = std::thread::scope(|scope| {
        let kernels = scope.spawn(|| kernels(root, install));
        let qemus = scope.spawn(|| qemus(root, install));
        let built = build_programs(root);
        (joined(kernels), joined(qemus), built)
    });
    let ((kernel, kernel_v1), (qemu, qemu_stock), (programs, tests)) = (kernels?, qemus?, built?);
    // The cache may have outlived what it was built with.
    if !runs(&qemu) {
        for package in LIBRARIES {
            provide(package, may_install)?;
        }
    }

    let daemon = find(&programs, "vhost-device-ism")?;
    let vm = find(&tests, "vm")?;
    let named = |programs: Vec<(&str, PathBuf)>| {
        programs.into_iter().map(|(name, path)| (name.to_owned(), path)).collect::<Vec<_>>()
    };
    let mut contents = Contents {
        kind: "initrd",
        busybox,
        init: root.join("tests/vm/init"),
        programs: named(vec![
            ("smc", find(&programs, "smc")?),
            ("smc-test-peer", find(&programs, "smc-test-peer")?),
            ("ip", ip),
            ("tc", tc),
        ]),
        files: verbs,
    };
    // <target>/release/vhost-device-ism
    let target = daemon.ancestors().nth(2).unwrap_or(root);
    let images = target.join("vm");
    let initrd = image::write(&contents, &images)?;
    // Each guest unpacks all that its image has, so most have an image without these.
    contents.kind = "tests";
    let usual = contents.programs.len();
    contents.programs.extend(named(vec![
        ("conformance", find(&tests, "conformance")?),
        ("verbs-rxe", find(&tests, "verbs_rxe")?),
        ("rendezvous", find(&tests, "rendezvous")?),
    ]));
    let initrd_tests = image::write(&contents, &images)?;
    contents.programs.truncate(usual);
    let found = match which {
        Which::Usual => programs::usual(may_install),
        Which::All => programs::all(root, &images, may_install),
    };
    let initrd_programs = match found {
        Ok(found) => {
            contents.kind = if which == Which::All { "all-programs" } else { "programs" };
            contents.programs.extend(found.programs);
            contents.files.extend(found.files);
            let library = find(&programs, "smc_preload")?;
            contents.files.push(("lib/libsmc_preload.so".into(), library));
            Some(image::write(&contents, &images)?)
        }
        Err(error) if which == Which::All || tool::is_true("CI") => return Err(error),
        Err(error) => {
            eprintln!("xtask: unmodified programs are not tested: {error}");
            None
        }
    };
    Ok(Parts {
        kernel,
        kernel_v1,
        initrd,
        initrd_tests,
        initrd_programs,
        qemu,
        qemu_stock,
        daemon,
        tests: vm,
    })
}

/// The guests' kernel, and the one for version 1 of SMC-R.
fn kernels(root: &Path, install: &[&str]) -> Result<(PathBuf, PathBuf), ToolError> {
    let script = root.join("tests/vm/kernel.sh");
    let v1_args = [&["--v1"], install].concat();
    Ok((given_or("KERNEL", &script, install)?, given_or("KERNEL_V1", &script, &v1_args)?))
}

/// QEMU with the patches and without, and firmware.
fn qemus(root: &Path, install: &[&str]) -> Result<(PathBuf, PathBuf), ToolError> {
    let script = root.join("qemu/build.sh");
    let stock_args = [&["--stock"], install].concat();
    let qemus =
        (given_or("QEMU", &script, install)?, given_or("QEMU_STOCK", &script, &stock_args)?);
    let mut firmware = Command::new(root.join("qemu/firmware.sh"));
    firmware.args(install);
    tool::output(firmware)?;
    Ok(qemus)
}

/// The programs of this repository, and its test programs.
fn build_programs(root: &Path) -> Result<(Executables, Executables), ToolError> {
    eprintln!("xtask: builds the programs (some minutes the first time)");
    let programs = cargo(root, &["build", "--bins", "--lib"])?;
    let mut test = vec!["test", "--no-run", "-p", "guest-driver"];
    for name in ["vm", "conformance", "verbs_rxe", "rendezvous"] {
        test.extend(["--test", name]);
    }
    Ok((programs, cargo(root, &test)?))
}

/// What a thread has come to.
fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The executable of an example of the tests.
///
/// # Errors
/// It does not build.
pub(crate) fn example(root: &Path, name: &str) -> Result<PathBuf, ToolError> {
    find(&cargo(root, &["build", "--example", name])?, name)
}

/// The back end of virtio sockets, to be measured with: `VSOCK_DAEMON`, or that of the rust-vmm project
/// from crates.io, kept in the cache. None, aloud, if it cannot be had.
///
/// # Errors
/// There is no place for a cache.
pub(crate) fn vsock() -> Result<Option<PathBuf>, ToolError> {
    const NAME: &str = "vhost-device-vsock";
    const VERSION: &str = "0.3.0";
    if let Some(path) = std::env::var_os("VSOCK_DAEMON") {
        return Ok(Some(path.into()));
    }
    let cache = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) => PathBuf::from(cache),
        (None, Some(home)) => Path::new(&home).join(".cache"),
        (None, None) => return Err(ToolError::NotCargo("HOME")),
    };
    let root = cache.join("vhost-device-ism").join(format!("{NAME}-{VERSION}"));
    let program = root.join("bin").join(NAME);
    if program.is_file() {
        return Ok(Some(program));
    }
    eprintln!("xtask: installs {NAME} {VERSION} from crates.io (a minute or two, once)");
    let mut install = Command::new(std::env::var_os("CARGO").ok_or(ToolError::NotCargo("CARGO"))?);
    install.args(["install", "--quiet", "--locked", "--version", VERSION, "--root"]);
    install.arg(&root).arg(NAME).stdout(Stdio::null());
    if tool::status(install)?.success() {
        return Ok(Some(program));
    }
    eprintln!("xtask: no {NAME}: virtio sockets are not measured");
    Ok(None)
}

/// Whether a program starts at all.
fn runs(program: &Path) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Finds something that packages bring, after installing them one by one if that is allowed.
pub(crate) fn installed<T>(
    find: impl Fn() -> Result<T, ToolError>,
    may_install: bool,
) -> Result<T, ToolError> {
    let mut before = None;
    loop {
        match find() {
            // One that did not help is not installed again.
            Err(ToolError::Missing(package)) if before != Some(package) => {
                provide(package, may_install)?;
                before = Some(package);
            }
            found => return found,
        }
    }
}

fn provide(package: &'static str, may_install: bool) -> Result<(), ToolError> {
    if may_install { install_package(package) } else { Err(ToolError::Missing(package)) }
}

fn install_package(package: &'static str) -> Result<(), ToolError> {
    eprintln!("xtask: installs {package}");
    let install = ["install", "-y", "-q", "--no-install-recommends", package];
    for args in [&["update", "-q"][..], &install] {
        let mut apt = Command::new("apt-get");
        // No service is to be started: only the programs are wanted.
        apt.args(args).env("DEBIAN_FRONTEND", "noninteractive").env("RUNLEVEL", "1");
        apt.stdout(Stdio::null());
        if !tool::status(apt)?.success() {
            return Err(ToolError::Missing(package));
        }
    }
    Ok(())
}

fn given_or(variable: &str, script: &Path, args: &[&str]) -> Result<PathBuf, ToolError> {
    match std::env::var_os(variable) {
        Some(path) => Ok(PathBuf::from(path)),
        None => tool::last_line(script, args),
    }
}

/// Runs cargo; the executables it made, by name of their target.
fn cargo(root: &Path, args: &[&str]) -> Result<Executables, ToolError> {
    let cargo = std::env::var_os("CARGO").ok_or(ToolError::NotCargo("CARGO"))?;
    let mut command = Command::new(cargo);
    command.current_dir(root).args(args).args(PACKAGES).args(FEATURES);
    command.args(["--release", "--message-format=json-render-diagnostics"]);
    let text = tool::output(command)?;
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let executable = |message: Value| {
        let name = message["target"]["name"].as_str()?.to_owned();
        let library = || {
            message["filenames"]
                .as_array()?
                .iter()
                .find_map(|file| file.as_str().filter(|file| file.ends_with(".so")))
        };
        let file = message["executable"].as_str().or_else(library)?;
        Some((name, PathBuf::from(file)))
    };
    Ok(messages.filter_map(executable).collect())
}

fn find(made: &[(String, PathBuf)], name: &str) -> Result<PathBuf, ToolError> {
    let found = made.iter().find(|(target, _)| target == name);
    found.map(|(_, path)| path.clone()).ok_or_else(|| ToolError::Answer {
        program: "cargo".to_owned(),
        what: format!("has built no {name}"),
    })
}
